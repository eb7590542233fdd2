"""The router: takes requests over HTTP, places each on a prefill and a decode worker, and streams the answer back."""
