"""Everything that has to be measured on a GPU, in six parts. Reading order: items (what is measured), measure (how),
bench (running jobs), run (time budget, resuming), page (tables), packages (wheels), command.
"""
