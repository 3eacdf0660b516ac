"""Carries collectives between the CPU ranks of one machine through memory that they share."""
