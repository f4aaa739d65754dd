"""Recipes, run folders and the steps that join the commands."""
