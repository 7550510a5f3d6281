"""The report: files of results as tables in Markdown, and a plot. Sections without data are left out and named."""
