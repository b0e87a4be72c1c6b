"""Exchange drafters with other programs: layouts, import, export."""
