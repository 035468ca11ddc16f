"""Plots of runs, by matplotlib."""
