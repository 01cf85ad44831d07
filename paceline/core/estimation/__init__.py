"""Running estimates from measurements.

timing: decode and forward times, acceptance rates, link delays
bandwidth: bytes per second of a link
running: moving averages, medians, line fits
"""
