"""Model families: one table of forms and weight names for each."""
