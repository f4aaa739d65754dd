"""Which channels stay: probes, heads, solvers, budgets, methods."""
