"""Drafts without a draft model: look-up tables, suffix automaton, token trees, and how many draft tokens pay. Pure."""
