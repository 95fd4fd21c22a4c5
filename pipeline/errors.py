"""The exit codes that every verb returns, and a training that its guard stopped."""

from earlyfusion.kernels.errors import UserError

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USER = 2
EXIT_REQUEUE = 75  # stopped by a signal with a checkpoint saved: start the same command again with --resume


class TrainingStopped(UserError):
    """The guard's policy says that training must not go on (exit code 1)."""

    exit_code = EXIT_FAILURE
