"""What a process tells a collector of traces about the requests that pass it; OpenTelemetry is imported when used.

A trace is one request's: the router begins it, and the messages that open an attempt carry the attempt's span to the
workers, in the form of W3C's ``traceparent``. Each process exports its own spans; nothing of them rides back.
"""
