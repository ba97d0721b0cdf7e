"""How good is a mask: latency table, replay, policy simulation, wall clock."""
