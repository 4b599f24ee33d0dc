"""Stages that a leg passes before it enters the engine, and stages that only observe the engine."""
