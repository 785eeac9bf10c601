# The public names and where they are: type checkers read this file, and `lazy_loader` loads by it.

from .coupled import Coupled as Coupled
from .objectives import cost as cost
from .objectives import examples_per_second as examples_per_second
from .objectives import seconds_to as seconds_to
from .processes.launch_search import SearchRun as SearchRun
from .processes.launch_search import launch_search as launch_search
from .screening import Screening as Screening
from .search import StrategySearch as StrategySearch
from .strategy_report import StrategyReport as StrategyReport
from .tuners import BayesianOptimization as BayesianOptimization
from .tuners import GridSearch as GridSearch
from .tuners import Hyperband as Hyperband
from .tuners import RandomSearch as RandomSearch
from .tuners import with_strategies as with_strategies
