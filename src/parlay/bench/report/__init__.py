"""Reports on files of results: tables in Markdown, and a plot. A report lists the sections that have no data."""
