"""The measuring is measured: timers, data, agreement, and every question at its smallest size."""
