"""Pictures and videos of prompts: fetched, prepared and held within bounds."""
