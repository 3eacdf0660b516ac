"""Read and write the files of a checkpoint: manifest, tensor files, and the folder they are put into."""
