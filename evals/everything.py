def command(args, run):
    pass
