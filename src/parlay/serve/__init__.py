"""The OpenAI-compatible server: `app.create_app` makes it, `parlay serve` runs it.

Its packages come with ``pip install 'parlay[serve]'``; importing `parlay.serve` alone needs none of them.
"""
