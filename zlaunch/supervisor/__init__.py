"""Carry out a plan from the launching machine: connect, follow, judge, try again. No torch."""
