"""Find the installs that a command of the user needs: interpreters, toolchains, version managers."""
