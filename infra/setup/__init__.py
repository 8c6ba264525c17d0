"""Set-up of the environments; standard library only, because it runs before anything is installed."""
