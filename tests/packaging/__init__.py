"""What a release is made of: the site, the wheel, the files for servers."""
