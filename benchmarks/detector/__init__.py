"""The detectors: recall and false alarms, on others' recorded series and beside published methods."""
