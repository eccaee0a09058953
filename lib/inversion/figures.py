"""Figures of the inversion notebooks. Every function takes tables and gives back a matplotlib figure."""
