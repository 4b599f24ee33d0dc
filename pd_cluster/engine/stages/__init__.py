"""The stages that a leg passes before it enters the engine, and stages that only follow the engine."""
