"""What the papers say that a rank sends and holds: one file a lesson, of the lesson's name."""
