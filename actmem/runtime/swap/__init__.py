"""Swap: storages leave the device while nobody needs them, and are back in time.

Swapper   decides what may leave, keeps what is on its way, brings it back ahead of use
storage   one storage's life: here, leaving, away, coming
tier      where the bytes go: `host` (pinned memory) or `disk` (a temporary file)
streams   who copies between device and host; threads do it for the disk
"""
