"""What people look at: tables for the terminal, plots for a slide."""
