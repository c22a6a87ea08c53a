"""Shared parts of pages. HTML: Jinja2 templates with autoescape on, one style, charts by uPlot; each page is one file.

Read markdown.py (text and tables that tools write, for terminals too), document.py (Markdown as HTML), render.py,
base.html, document.html (a verdict, tables and pictures), charts.js (curves of runs). uplot/ is uPlot 1.6.32
(https://github.com/leeoniya/uPlot, MIT), unchanged.
"""
