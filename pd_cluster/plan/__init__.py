"""The layout that serves a load within its goals: searched over the simulator, on devices measured or computed."""
