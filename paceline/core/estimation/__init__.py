"""Running estimates: decode times, bandwidth, means and quantiles. Pure."""
