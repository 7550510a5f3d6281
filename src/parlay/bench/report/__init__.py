"""The report: files of results as a page, tables and plots. Sections without data are left out and named."""
