"""Drafters from and for others: layouts, import, export."""
