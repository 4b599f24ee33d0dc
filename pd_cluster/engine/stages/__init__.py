"""The stages that a leg passes on its way into the engine, and those that follow what the engine does."""
