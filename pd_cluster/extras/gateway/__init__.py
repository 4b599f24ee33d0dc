"""The endpoint picker of the Gateway API's inference extension: tells a gateway which scheduler serves a request."""
