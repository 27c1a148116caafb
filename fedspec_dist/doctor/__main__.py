import sys

from fedspec_dist.doctor import main

sys.exit(main())
