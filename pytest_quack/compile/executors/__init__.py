"""Where compiles run: processes of this machine today, other machines later."""
