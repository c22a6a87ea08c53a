"""What every HTML page shares: Jinja2 templates with autoescape on, one style, charts by uPlot. Each page is one file.

Read render.py, base.html, charts.js (curves of runs), findings.html (a verdict, tables and pictures). uplot/ is uPlot
1.6.32 (https://github.com/leeoniya/uPlot, MIT), unchanged.
"""
