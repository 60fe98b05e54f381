"""Would a config fit, and how long would a step take: compiles its train step for a simulated mesh, runs nothing."""
