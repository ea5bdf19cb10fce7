-- Repeat offenders: devices by in how many runs they were lost or flagged.
select device, n_runs, n_runs_affected, n_losses, n_verdicts, array_to_string(causes, ', ') as causes, slowest,
    make_timestamp(last_trouble_us) as last_trouble, last_run
from device_history
order by n_runs_affected desc, n_losses + n_verdicts desc, device
