"""Bugs to find with a receipt, one patch each, and questions with numbers."""
