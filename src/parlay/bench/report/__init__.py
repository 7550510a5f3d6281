"""The report: what files of results hold, as a page, a table and plots. What was not measured is left out and named."""
