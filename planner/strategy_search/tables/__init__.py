"""Strategies of operators and what each costs."""
