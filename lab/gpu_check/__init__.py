"""Everything that has to be measured on a GPU, in six parts. Reading order: items (what is measured), measure (how),
bench (its jobs), run (budget and resumption), page (the table), packages (wheels), command.
"""
