"""Everything that puts a request into the pipeline.

The HTTP gateway, the intake that the gateway and the websocket edge share, and the door that knows the
API keys. Nothing here knows an engine or a scheduling policy.
"""
