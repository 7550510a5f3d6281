"""Models with canvases: texts to train and to ask them on, and what their ways to decode come to."""
