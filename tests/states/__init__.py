"""The router and several simulated engines in one process, driven through random turns on a clock of their own."""
