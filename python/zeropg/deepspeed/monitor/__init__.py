"""Monitors: where rank 0 writes numbers of a run, as the configuration's blocks ask for."""

from zeropg.deepspeed.monitor.monitor import Event, Monitor, MonitorMaster, make_monitor

__all__ = ["Event", "Monitor", "MonitorMaster", "make_monitor"]
