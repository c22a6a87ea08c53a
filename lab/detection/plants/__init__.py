"""How each defect gets into a run while it runs; read site.py, then any other."""
