"""Exit status 0 when this container's instance answers /health with 200, 1 otherwise. Needs the standard library."""

import os
import sys
import urllib.request

TIMEOUT_S = 3.0

url = f"http://127.0.0.1:{os.environ.get('HEALTH_PORT', '8000')}/health"
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    direct.open(url, timeout=TIMEOUT_S).close()
except OSError as error:  # urllib's own errors, 503 among them, are OSErrors
    sys.exit(f"{url}: {error}")
