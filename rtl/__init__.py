"""SHARP in Amaranth: every component takes the machine whole and cuts its pipelines from the machine's latencies."""
