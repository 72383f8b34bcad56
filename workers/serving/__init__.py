"""What the processes are served by: worker classes of gunicorn. The processes are the files beside this folder."""
